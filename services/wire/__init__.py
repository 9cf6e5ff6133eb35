"""What travels between a training process and an auxiliary service: frames and typed messages, never pickle."""
