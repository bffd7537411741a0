"""The composition root: read the settings, open the configured adapters, and build the features on them."""
