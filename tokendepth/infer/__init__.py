"""Running a trained model: generating text, compiling for speed, choosing when to skip."""
