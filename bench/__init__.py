"""Measurements. Not shipped with the package: everything here runs from a checkout."""
