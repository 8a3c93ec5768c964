"""Small networks: their forward pass in numpy, and networks of other libraries as policies."""
