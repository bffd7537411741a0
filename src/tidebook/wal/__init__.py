"""Write-ahead logs: a region is one log that many tables share, with one owner that writes to it."""
