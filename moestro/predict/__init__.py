"""What a step, and a whole training run, will take: time, memory, money, energy; and how sure that is."""
