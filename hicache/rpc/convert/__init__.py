"""Between protobuf's messages and hicache's own records: the only place that knows both.

`encode_*` makes a message of a record, `decode_*` a record of a message. Who decodes what came from outside gets the
record or an error that says what is wrong, where, and what to do. Fields that are not known are ignored, so that a
newer client can talk to an older service.

- `identity`: namespaces, geometries, scopes.
- `session`: what travels in a session's stream.
- `admin`: administration, and residency events.
- `lifeline`: packets of the lifeline; the only module that is used outside `hicache.rpc`, as it takes and gives bytes.
"""
