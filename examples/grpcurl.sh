#!/bin/sh
# Predicts a flight by gRPC, and sends back what became of it, with grpcurl.
#
#     python examples/protoset.py perennial.protoset
#     PROTOSET=perennial.protoset sh examples/grpcurl.sh
#
# The servers have no reflection: the protoset tells grpcurl their messages. Bytes are base64 in
# JSON: "VUE=" is "UA". ROUTER and LABELS say where; LABELS_KEY holds the API key where there is one.
set -eu
ROUTER=${ROUTER:-127.0.0.1:9000}
LABELS=${LABELS:-127.0.0.1:9010}
PROTOSET=${PROTOSET:-perennial.protoset}

# The router takes a request id from the client when it is unique.
request_id=$(cat /proc/sys/kernel/random/uuid)

grpcurl -plaintext -max-time 5 -protoset "$PROTOSET" \
    -H 'x-routing-key: N14228' \
    -H 'x-perennial-model: flights' \
    -H "x-request-id: $request_id" \
    -d '{
      "modelSpec": {"name": "flights"},
      "inputs": {
        "carrier": {"dtype": "DT_STRING", "tensorShape": {"dim": [{"size": 1}]}, "stringVal": ["VUE="]},
        "origin": {"dtype": "DT_STRING", "tensorShape": {"dim": [{"size": 1}]}, "stringVal": ["RVdS"]},
        "dest": {"dtype": "DT_STRING", "tensorShape": {"dim": [{"size": 1}]}, "stringVal": ["SUFI"]},
        "month": {"dtype": "DT_INT64", "tensorShape": {"dim": [{"size": 1}]}, "int64Val": [1]},
        "day_of_week": {"dtype": "DT_INT64", "tensorShape": {"dim": [{"size": 1}]}, "int64Val": [1]},
        "sched_dep_minute": {"dtype": "DT_INT64", "tensorShape": {"dim": [{"size": 1}]}, "int64Val": [315]},
        "sched_arr_minute": {"dtype": "DT_INT64", "tensorShape": {"dim": [{"size": 1}]}, "int64Val": [499]},
        "distance": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [1400]},
        "temp": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [39]},
        "dewp": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [28]},
        "humid": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": ["NaN"]},
        "wind_speed": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [12.7]},
        "precip": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [0]},
        "pressure": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [1011.9]},
        "visib": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": 1}]}, "floatVal": [10]}
      }
    }' \
    "$ROUTER" tensorflow.serving.PredictionService/Predict

grpcurl -plaintext -max-time 5 -protoset "$PROTOSET" \
    -H "authorization: Bearer ${LABELS_KEY:-}" \
    -d "{\"model\": \"flights\", \"source\": \"example\",
         \"labels\": [{\"requestId\": \"$request_id\", \"row\": 0, \"value\": 1}]}" \
    "$LABELS" perennial.labels.v1.LabelService/RecordLabels
