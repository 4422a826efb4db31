"""The loop that trains named runs side by side, and the parts that it holds."""
