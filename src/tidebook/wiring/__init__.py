"""The composition root: a folder, a settings file or a URL becomes adapters, and adapters become features."""
