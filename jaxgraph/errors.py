"""What planning raises when it cannot make a program; ``wrap`` then keeps the plain function."""


class PlanError(Exception):
    """The step (or a split) cannot be planned; the message says why."""
