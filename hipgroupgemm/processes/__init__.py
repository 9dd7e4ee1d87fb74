"""Worker processes that may crash or hang."""
