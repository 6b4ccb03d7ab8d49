"""How a batch is divided over ranks, and moved between workers without passing through the controller."""
