#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

/// Draws the training losses and the validations in the rows of a log, in bits per byte over steps, into an SVG file.
void write_loss_plot(const std::string& path, const std::vector<nlohmann::json>& rows);
