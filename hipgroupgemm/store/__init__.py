"""The tuning store: records, lookup and the file."""
