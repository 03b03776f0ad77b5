"""The service's protocol, its server and its client."""

import os as _os

# Before gRPC is loaded: its handlers around fork() are on by default, and now and then they crash the child of a
# process that has a session open. No child of ours uses what its parent has opened. Who sets the variable decides.
_os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
