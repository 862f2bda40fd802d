#!/bin/sh
# Predicts a flight by REST, and sends back what became of it, with curl.
#
#     sh examples/rest_curl.sh
#
# ROUTER and LABELS say where; LABELS_KEY holds the API key where the intake asks for one.
set -eu
ROUTER=${ROUTER:-127.0.0.1:9000}
LABELS=${LABELS:-127.0.0.1:9015}
headers=$(mktemp)
trap 'rm -f "$headers"' EXIT

curl --silent --show-error --fail-with-body --max-time 5 --dump-header "$headers" \
    --header 'content-type: application/json' \
    --header 'x-routing-key: N14228' \
    --data '{"instances": [{
        "carrier": "UA", "origin": "EWR", "dest": "IAH", "month": 1, "day_of_week": 1,
        "sched_dep_minute": 315, "sched_arr_minute": 499, "distance": 1400.0,
        "temp": 39.0, "dewp": 28.0, "humid": 64.4, "wind_speed": 12.7, "precip": 0.0,
        "pressure": 1011.9, "visib": 10.0}]}' \
    "http://$ROUTER/v1/models/flights:predict"
request_id=$(tr -d '\r' <"$headers" | sed -n 's/^x-request-id: *//p')
echo "request id: $request_id"

# One label.
curl --silent --show-error --fail-with-body --max-time 5 \
    --header 'content-type: application/json' \
    --header "authorization: Bearer ${LABELS_KEY:-}" \
    --data "{\"request_id\": \"$request_id\", \"value\": 0}" \
    "http://$LABELS/v1/models/flights/labels"

# A batch, gzipped, from a source of its own: the label was corrected.
printf '{"source": "audit", "labels": [{"request_id": "%s", "row": 0, "value": 1, "time": "%s"}]}' \
    "$request_id" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" | gzip |
    curl --silent --show-error --fail-with-body --max-time 5 \
        --header 'content-type: application/json' \
        --header 'content-encoding: gzip' \
        --header "authorization: Bearer ${LABELS_KEY:-}" \
        --data-binary @- \
        "http://$LABELS/v1/models/flights/labels"
