"""Batch prediction: files in, scores of one version out, by Apache Beam's RunInference.

rows.py      what a row must be: input files → shards → tensors, bad rows apart
pipeline.py  the Beam pipeline over the SavedModel, one shard at a time
job.py       the whole job: which version, what is done already, the published folder
"""
