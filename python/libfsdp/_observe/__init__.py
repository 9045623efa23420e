"""Statistics and reports of training steps, and checks of what they compute."""
