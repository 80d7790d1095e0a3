"""What the machine is and how fast it measures."""
