"""The built-in environments: one file each, named as in a recipe, whose class is ``ENVIRONMENT``."""
