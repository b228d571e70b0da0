"""Model cards, and publishing drafts on the Hub."""

from .card import is_by_hand, render_card, write_card
from .push import push_export, push_to_hub, write_code

__all__ = ["is_by_hand", "push_export", "push_to_hub", "render_card", "write_card", "write_code"]
