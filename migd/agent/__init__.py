"""The node transaction: decide (pure), journal, apply, verify, roll back."""
