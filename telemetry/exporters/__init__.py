"""Live scraping of exporter pages: who is asked, when, by which process, and what the answers and their absence say."""
