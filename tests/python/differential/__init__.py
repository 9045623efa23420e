"""Random programs over random sharded models, against plain replicas. ``python -m differential --help``."""
