"""What share of quality a hit keeps: tasks, methods, measurement and reports."""
