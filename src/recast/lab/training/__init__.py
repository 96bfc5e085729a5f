"""Training: `loop.fit` trains one model into a folder, `run.train` makes a whole run of both arms."""
