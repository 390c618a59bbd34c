"""What autopar is measured against."""
