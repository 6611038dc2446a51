"""What any command line of the project is made of: parsing, errors, exit statuses, progress, where to write."""
