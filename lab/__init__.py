"""What the tutorials teach about machines, apart from distillation: studies of them, and strategies that teach."""
