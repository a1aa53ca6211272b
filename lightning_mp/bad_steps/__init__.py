"""Non-finite steps: how they are skipped, diagnosed, saved and rewound."""
