"""A trace as load on a real server: what is sent, when, what came back, and what the simulator says of the same run."""
