"""The tape: arrays that remember how they were made, and derivatives of what they recorded as graphs."""
