"""A model server that speaks tensorflow_model_server's protocol, where the real one is missing.

`python -m serving.embedded --port=8500 --rest_api_port=8501 --model_config_file=models.config`

    flags.py      command line → Flags
    config.py     ModelServerConfig: reading, checking, which versions it asks for
    manager.py    what is loaded: versions, labels, transitions, reloads
    loading.py    makes a version ready; warmup.py replays its recorded requests
    servable.py   one loaded version; signature.py what may be asked of it
    program.py    what a session runs; batching.py runs several requests of one together
    session.py    every private call into TensorFlow
    tensors.py    TensorProto ↔ numpy; jsontensors.py, jsonexamples.py JSON ↔ numpy
    predict.py, examples.py   requests → checked calls → answers
    inference.py  answers a call for both interfaces; metrics.py counts it
    services.py   gRPC; rest.py on http.py; tls.py
    server.py     puts them together, serves, drains

It never pretends: `--version` says what it is. docs/serving/differences.md lists where it differs.
"""
