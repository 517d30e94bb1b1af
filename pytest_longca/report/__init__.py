"""Records, and what is made of them: terminal, HTML, gate."""
