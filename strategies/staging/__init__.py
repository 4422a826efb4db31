"""How a module is cut into stages, and how a batch gets through them."""
