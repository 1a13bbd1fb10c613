"""What five course pages build, a file for each page, with the names that they print."""
