"""What the router learned: who gets depth, by kind of token."""
