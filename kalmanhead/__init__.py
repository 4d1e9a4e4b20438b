"""Learns neural networks from streams, with the last layer kept as a Kalman filter."""
