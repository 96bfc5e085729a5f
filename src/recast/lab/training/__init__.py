"""Training: `loop.fit` trains one model into a folder, `run.train` makes a run of both arms."""
