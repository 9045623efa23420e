"""What the tests of the Python package share."""
