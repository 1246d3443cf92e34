"""What is run to make the project's own pages and releases, and is no part of the package."""
