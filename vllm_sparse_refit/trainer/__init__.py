"""The trainer's side: the baseline, the streaming pipeline and the synchronizer."""
