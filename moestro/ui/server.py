"""The page's own small web server, on this machine."""

import socket
from collections.abc import Callable

from fastapi import Request
from nicegui import app, ui

from moestro.errors import MoestroError
from moestro.ui.finding import cancel_all
from moestro.ui.offer import Offer
from moestro.ui.page import Explorer


def serve(offer: Offer, host: str, port: int, show: bool, query: str = "") -> None:
    """Until Ctrl-C. port 0: any that is free. show: open a browser.

    Raises:
        MoestroError: the port is taken, or is not ours to take.
    """
    port = free_port(host, port)
    address = f"http://{host}:{port}/"
    app.on_startup(lambda: print(f"{address}   (Ctrl-C ends it)", flush=True))
    app.on_shutdown(cancel_all)
    ui.run(
        page_of(offer), host=host, port=port, title="Moestro plan explorer", favicon=FAVICON, reload=False, show=show,
        tailwind=False, show_welcome_message=False, binding_refresh_interval=None, reconnect_timeout=RECONNECT_S,
    )  # fmt: skip


def page_of(offer: Offer) -> Callable[[Request], None]:
    """What is built for every browser window that comes."""

    def page(request: Request) -> None:
        Explorer(offer, dict(request.query_params))

    return page


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises MoestroError where it cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise MoestroError(
                f"cannot listen on {host}:{port}: {error.strerror}; take another --port, or 0 for any"
            ) from error
        return int(probe.getsockname()[1])


RECONNECT_S = 20.0  # for which a page that cannot reach the server is kept: a laptop that slept, a busy machine
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#3355cc" d="M1 2h7v4H1z"/>'
    '<path fill="#d9580d" d="M8 7h7v4H8z"/><path fill="#0b8a83" d="M3 13h10v2H3z"/></svg>'
)
