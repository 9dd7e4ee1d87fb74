"""HIP, through hip-python."""
