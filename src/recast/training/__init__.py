"""Training: `recast.training.fit.fit` trains one model into a folder, `recast.training.run.train` makes a whole run."""
