#include "checkpoint/zip.h"

#include <algorithm>
#include <utility>

#include "checkpoint/checksum.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

// The parts of an archive (PKWARE's APPNOTE.TXT, 4.3), by their first four bytes, and their fixed sizes.
constexpr std::uint32_t kLocalHeader = 0x04034B50;
constexpr std::uint32_t kDescriptor = 0x08074B50;
constexpr std::uint32_t kDirectoryEntry = 0x02014B50;
constexpr std::uint32_t kZip64End = 0x06064B50;
constexpr std::uint32_t kZip64Locator = 0x07064B50;
constexpr std::uint32_t kEnd = 0x06054B50;
constexpr std::int64_t kLocalHeaderSize = 30;
constexpr std::int64_t kDirectoryEntrySize = 46;
constexpr std::int64_t kZip64EndSize = 56;
constexpr std::int64_t kZip64LocatorSize = 20;
constexpr std::int64_t kEndSize = 22;

constexpr std::uint16_t kZip64Field = 1;
constexpr std::uint16_t kPaddingField = 0x4246;  // "FB", torch's
constexpr std::uint16_t kFlags = 0x0808;         // names are UTF-8; sizes and checksum follow the data
constexpr std::uint16_t kEncrypted = 1;
constexpr std::int64_t kTooLarge = 0xFFFFFFFF;  // for the 32-bit fields: the value is in the zip64 field
constexpr std::string_view kFolder = "archive/";

/// Bytes of the list of entries: a record of a tensor has seven entries, and none of a plain value has more.
constexpr std::uint64_t kMostDirectory = 1 << 20;

void put(std::string& text, std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i));
}

std::uint64_t get(std::string_view text, std::size_t at, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{static_cast<unsigned char>(text[at + i])} << (8 * i);
  return value;
}

std::uint64_t in_32_bits(std::int64_t value) { return static_cast<std::uint64_t>(std::min(value, kTooLarge)); }

}  // namespace

void ZipWriter::append(std::string_view bytes) {
  text_ += bytes;
  position_ += static_cast<std::int64_t>(bytes.size());
}

std::string ZipWriter::take() { return std::exchange(text_, {}); }

void ZipWriter::begin(std::string_view name, std::int64_t size) {
  Entry entry{std::string(kFolder) + std::string(name), position_, size, 0};
  std::string fields;
  if (size >= kTooLarge) {
    put(fields, kZip64Field, 2);
    put(fields, 16, 2);
    put(fields, static_cast<std::uint64_t>(size), 8);
    put(fields, static_cast<std::uint64_t>(size), 8);
  }
  const auto begin = position_ + kLocalHeaderSize + static_cast<std::int64_t>(entry.name.size() + fields.size()) + 4;
  const std::int64_t padding = (kAlignment - begin % kAlignment) % kAlignment;
  put(fields, kPaddingField, 2);
  put(fields, static_cast<std::uint64_t>(padding), 2);
  fields.append(static_cast<std::size_t>(padding), 'Z');

  std::string header;
  put(header, kLocalHeader, 4);
  put(header, 0, 2);  // version
  put(header, kFlags, 2);
  put(header, 0, 2);  // stored
  put(header, 0, 4);  // no time: equal content gives equal bytes
  put(header, 0, 4);  // checksum and sizes: in the descriptor
  put(header, 0, 8);
  put(header, entry.name.size(), 2);
  put(header, fields.size(), 2);
  append(header.append(entry.name).append(fields));
  position_ += size;
  entries_.push_back(std::move(entry));
}

void ZipWriter::end(std::uint32_t crc32) {
  Entry& entry = entries_.back();
  entry.crc32 = crc32;
  const int width = entry.size >= kTooLarge ? 8 : 4;
  std::string descriptor;
  put(descriptor, kDescriptor, 4);
  put(descriptor, crc32, 4);
  put(descriptor, static_cast<std::uint64_t>(entry.size), width);
  put(descriptor, static_cast<std::uint64_t>(entry.size), width);
  append(descriptor);
}

void ZipWriter::add(std::string_view name, std::string_view data) {
  begin(name, static_cast<std::int64_t>(data.size()));
  text_ += data;  // already counted
  end(ckpt::crc32(0, data));
}

void ZipWriter::finish() {
  const std::int64_t directory = position_;
  for (const Entry& entry : entries_) {
    std::string fields;
    if (entry.size >= kTooLarge) {
      put(fields, static_cast<std::uint64_t>(entry.size), 8);
      put(fields, static_cast<std::uint64_t>(entry.size), 8);
    }
    if (entry.header >= kTooLarge) put(fields, static_cast<std::uint64_t>(entry.header), 8);
    if (!fields.empty()) {
      std::string head;
      put(head, kZip64Field, 2);
      put(head, fields.size(), 2);
      fields.insert(0, head);
    }
    std::string text;
    put(text, kDirectoryEntry, 4);
    put(text, 0, 4);  // versions
    put(text, kFlags, 2);
    put(text, 0, 2);  // stored
    put(text, 0, 4);  // time
    put(text, entry.crc32, 4);
    put(text, in_32_bits(entry.size), 4);
    put(text, in_32_bits(entry.size), 4);
    put(text, entry.name.size(), 2);
    put(text, fields.size(), 2);
    put(text, 0, 4);  // comment, disk
    put(text, 0, 6);  // attributes
    put(text, in_32_bits(entry.header), 4);
    append(text.append(entry.name).append(fields));
  }
  const std::int64_t size = position_ - directory;
  const std::int64_t zip64_end = position_;
  std::string text;
  put(text, kZip64End, 4);
  put(text, kZip64EndSize - 12, 8);
  put(text, 0x002D031E, 4);  // made by and for version 4.5, like torch's
  put(text, 0, 8);           // disks
  put(text, entries_.size(), 8);
  put(text, entries_.size(), 8);
  put(text, static_cast<std::uint64_t>(size), 8);
  put(text, static_cast<std::uint64_t>(directory), 8);
  put(text, kZip64Locator, 4);
  put(text, 0, 4);
  put(text, static_cast<std::uint64_t>(zip64_end), 8);
  put(text, 1, 4);  // disks
  put(text, kEnd, 4);
  put(text, 0, 4);  // disks
  put(text, entries_.size(), 2);
  put(text, entries_.size(), 2);
  put(text, in_32_bits(size), 4);
  put(text, in_32_bits(directory), 4);
  put(text, 0, 2);  // comment
  append(text);
}

void ZipReader::fail(const std::string& why) const { throw Error(what_ + ": " + why); }

std::string ZipReader::read(std::int64_t offset, std::int64_t length) const {
  std::string bytes(static_cast<std::size_t>(length), '\0');
  read_(offset, bytes);
  return bytes;
}

ZipReader::ZipReader(ReadAt read_at, std::int64_t length, std::string what) : read_(std::move(read_at)), what_(std::move(what)) {
  const char* const kNoZip = "not a record of torch.save: it does not end as a zip archive does";
  if (length < kEndSize) fail(kNoZip);
  const std::string end = read(length - kEndSize, kEndSize);
  if (get(end, 0, 4) != kEnd || get(end, 20, 2) != 0) fail(kNoZip);
  std::uint64_t count = get(end, 10, 2);
  std::uint64_t size = get(end, 12, 4);
  std::uint64_t begin = get(end, 16, 4);
  std::int64_t directory_end = length - kEndSize;
  if (length >= kEndSize + kZip64LocatorSize + kZip64EndSize) {
    const std::string locator = read(directory_end - kZip64LocatorSize, kZip64LocatorSize);
    if (get(locator, 0, 4) == kZip64Locator) {
      directory_end -= kZip64LocatorSize + kZip64EndSize;
      const std::string zip64_end = read(directory_end, kZip64EndSize);
      if (get(locator, 8, 8) != static_cast<std::uint64_t>(directory_end) || get(zip64_end, 0, 4) != kZip64End) fail(kNoZip);
      count = get(zip64_end, 32, 8);
      size = get(zip64_end, 40, 8);
      begin = get(zip64_end, 48, 8);
    }
  }
  const auto most = static_cast<std::uint64_t>(directory_end);
  if (size > most || begin != most - size) fail("the list of the archive's entries is not where it should be");
  if (size > kMostDirectory) fail("the list of the archive's entries has " + std::to_string(size) + " bytes, too many for one value");
  if (count > size / kDirectoryEntrySize) fail("the archive names more entries than it lists");
  directory_ = static_cast<std::int64_t>(begin);

  const std::string directory = read(directory_, static_cast<std::int64_t>(size));
  std::string_view rest = directory;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (rest.size() < kDirectoryEntrySize || get(rest, 0, 4) != kDirectoryEntry) fail("the list of the archive's entries is damaged");
    const std::size_t name_length = get(rest, 28, 2);
    const std::size_t fields_length = get(rest, 30, 2);
    const std::size_t entry_length = kDirectoryEntrySize + name_length + fields_length + get(rest, 32, 2);
    if (rest.size() < entry_length) fail("the list of the archive's entries is damaged");
    std::string_view name = rest.substr(kDirectoryEntrySize, name_length);
    std::uint64_t packed = get(rest, 20, 4);
    std::uint64_t unpacked = get(rest, 24, 4);
    std::uint64_t header = get(rest, 42, 4);
    std::string_view fields = rest.substr(kDirectoryEntrySize + name_length, fields_length);
    while (fields.size() >= 4) {
      const std::size_t field_length = get(fields, 2, 2);
      if (field_length > fields.size() - 4) break;
      if (get(fields, 0, 2) == kZip64Field) {
        std::string_view values = fields.substr(4, field_length);
        for (std::uint64_t* value : {&unpacked, &packed, &header}) {
          if (*value != kTooLarge || values.size() < 8) continue;
          *value = get(values, 0, 8);
          values.remove_prefix(8);
        }
      }
      fields.remove_prefix(4 + field_length);
    }
    if (packed > begin || header > begin || unpacked > begin) fail("entry '" + std::string(name) + "' does not lie in the archive");
    if ((get(rest, 8, 2) & kEncrypted) != 0) fail("entry '" + std::string(name) + "' is encrypted");
    const bool is_compressed = get(rest, 10, 2) != 0 || packed != unpacked;
    const std::size_t slash = name.find('/');
    if (slash != std::string_view::npos) name.remove_prefix(slash + 1);
    const auto crc32 = static_cast<std::uint32_t>(get(rest, 16, 4));
    entries_.push_back({std::string(name), static_cast<std::int64_t>(header), static_cast<std::int64_t>(unpacked), is_compressed,
                        crc32 == 0 ? std::nullopt : std::optional(crc32)});
    rest.remove_prefix(entry_length);
  }
}

const ZipReader::Entry* ZipReader::find(std::string_view name) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.name == name; });
  return found == entries_.end() ? nullptr : &*found;
}

const ZipReader::Entry& ZipReader::at(std::string_view name) const {
  const Entry* entry = find(name);
  if (entry == nullptr) fail("not a record of torch.save: it has no entry '" + std::string(name) + "'");
  return *entry;
}

std::int64_t ZipReader::data_offset(const Entry& entry) const {
  if (entry.is_compressed) fail("entry '" + entry.name + "' is compressed, which torch.save never does");
  if (entry.header > directory_ - kLocalHeaderSize) fail("entry '" + entry.name + "' does not lie in the archive");
  const std::string header = read(entry.header, kLocalHeaderSize);
  if (get(header, 0, 4) != kLocalHeader) fail("entry '" + entry.name + "' is not where the archive says");
  const auto offset = entry.header + kLocalHeaderSize + static_cast<std::int64_t>(get(header, 26, 2) + get(header, 28, 2));
  if (offset > directory_ || entry.size > directory_ - offset) fail("entry '" + entry.name + "' does not lie in the archive");
  return offset;
}

std::string ZipReader::data(const Entry& entry) const {
  std::string data = read(data_offset(entry), entry.size);
  if (entry.crc32 && ckpt::crc32(0, data) != *entry.crc32) fail("entry '" + entry.name + "' is damaged: it has another checksum");
  return data;
}

}  // namespace fsdp::ckpt
