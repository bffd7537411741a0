"""What ./dev runs. Standard library only: it works before the virtual environment exists."""
