"""Context parallelism: layouts, planner, communicators and five mechanisms."""
