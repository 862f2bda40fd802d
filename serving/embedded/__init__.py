"""A model server that speaks tensorflow_model_server's protocol, where the real one is missing.

`python -m serving.embedded --port=8500 --rest_api_port=8501 --model_config_file=models.config`

    flags.py      command line → Flags
    config.py     ModelServerConfig: reading, checking, which versions it asks for
    manager.py    what is loaded: versions, labels, transitions, reloads
    servable.py   one loaded version; warmup.py replays its recorded requests
    session.py    every private call into TensorFlow
    tensors.py    TensorProto ↔ numpy; jsontensors.py JSON ↔ numpy
    inference.py  gRPC services; rest.py the HTTP ones; metrics.py what both count
    server.py     puts them together, serves, drains

It never pretends: `--version` says what it is. docs/serving/differences.md lists where it differs.
"""
