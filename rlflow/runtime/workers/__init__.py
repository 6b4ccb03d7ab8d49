"""The processes that hold engines, and the weights on their way between them."""
