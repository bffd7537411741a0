"""The composition root: read the settings, open the adapters they name, and build the features on them."""
