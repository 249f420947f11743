"""Run a Python program whose broadcasts go to 127.0.0.1:$WAKES_PORT alone: no packet of a test leaves this machine.

    noting_wakes.py PROGRAM ARGUMENT…
"""

import os
import runpy
import socket
import sys


class Socket(socket.socket):
    def sendto(self, data, where):
        if where[0] == "255.255.255.255":
            if not self.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST):
                raise PermissionError(13, "Permission denied")  # as the kernel has it
            where = ("127.0.0.1", int(os.environ["WAKES_PORT"]))
        return super().sendto(data, where)


socket.socket = Socket
sys.argv = sys.argv[1:]
sys.exit(runpy.run_path(sys.argv[0], run_name="llmguard")["main"]())  # not as __main__: that starts again without our socket
