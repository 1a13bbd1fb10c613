"""What heads do and cause: watched, surveyed, silenced, patched, steered, aligned."""
