"""What the tutorials teach about machines, apart from distillation: studies, programs, and strategies that teach."""
